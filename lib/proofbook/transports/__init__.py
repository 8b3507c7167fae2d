"""Ways to run a command on a machine: base.py (the protocol), ssh.py (OpenSSH servers, the only import of fabric)."""
