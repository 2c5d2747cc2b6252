"""What all other packages may use; it uses nothing of theirs but model/errors.py and model/ranges.py."""
