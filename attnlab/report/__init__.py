"""Pictures and HTML pages of runs and sweeps. The page of a run is made from the files of its directory alone."""
