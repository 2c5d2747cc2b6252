"""Many runs and one table of them: `python run.py grid`."""
