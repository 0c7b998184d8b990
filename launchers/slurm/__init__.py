"""Commands for Slurm: submit.py is what a user types; node.py and preflight.py are what its job runs on the nodes, one process each."""
