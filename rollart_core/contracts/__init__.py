"""The interfaces between RollArt and its plugins. Each kind of plugin has one file."""
