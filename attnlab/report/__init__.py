"""Pictures and pages of a run, made from what lies in its directory alone."""
