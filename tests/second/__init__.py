"""Second implementations of some concepts, written differently; see tests/replace.py."""
