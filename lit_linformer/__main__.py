"""`python -m lit_linformer COMMAND` does the same as run.py, for an installed package, which lacks run.py."""

from lit_linformer.cli import main

if __name__ == "__main__":
    main()
