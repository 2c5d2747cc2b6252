"""`python -m lit_linformer COMMAND`, the same as run.py where the package is installed without it."""

from lit_linformer.cli import main

if __name__ == "__main__":
    main()
