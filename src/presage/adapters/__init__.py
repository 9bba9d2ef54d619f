"""presage's times in other tools."""
