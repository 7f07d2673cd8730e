"""Speed and memory, measured against what a user would pick instead. `make bench`; see run.py."""
