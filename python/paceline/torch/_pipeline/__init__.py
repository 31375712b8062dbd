"""Trains a module that is cut into stages on several devices."""
