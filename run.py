"""python run.py fit|validate|test|predict|prepare|grid --config conf/….yaml; `python run.py --help` lists what there is."""

from lit_linformer.cli import main

if __name__ == "__main__":
    main()
