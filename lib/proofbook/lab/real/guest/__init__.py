"""Programs that run inside the machines of the real lab. Each says what it stands in for."""
