"""Our code beside what a user would pick instead, measured in one run."""
