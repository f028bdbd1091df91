"""What compiled models capture: each module reads the folders of one library's capture."""
