"""python run.py COMMAND --config conf/….yaml; `python run.py --help` lists the commands."""

from lit_linformer.cli import main

if __name__ == "__main__":
    main()
