"""What a call may need beside forward, backward and sums: one file each. To delete a feature, delete its file and its line in `every.py`."""
