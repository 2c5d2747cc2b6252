"""Speed and memory: `python run.py benchmark --what SUBJECT`, one file for each subject."""
