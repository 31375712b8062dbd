"""The replicas: each device's own copy of the user's module, which shares the user's parameters."""
