"""What all other packages may use; of these it uses only model/errors.py and model/ranges.py."""
