"""The models behind the service; no BentoML and no HTTP in here."""
