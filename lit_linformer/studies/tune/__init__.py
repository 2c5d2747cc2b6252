"""A search for better settings: `python run.py tune`."""
