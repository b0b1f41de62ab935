"""Readers: file formats as images, one module for each format."""
