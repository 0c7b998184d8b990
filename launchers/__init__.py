"""Commands. Each file is run by its path (`torchrun launchers/pretrain.py`); it is a package so that the import contracts see it."""
