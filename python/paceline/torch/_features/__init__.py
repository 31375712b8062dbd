"""What a call may need beside forward, backward and sums: one file each. Deleting a file and its line in `every.py` deletes the feature."""
