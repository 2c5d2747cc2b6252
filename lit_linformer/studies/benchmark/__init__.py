"""What is measured of speed and memory: `python run.py benchmark --what SUBJECT`, a file a subject."""
