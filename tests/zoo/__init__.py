"""Third-party models against eager PyTorch: exactness, operators in strips, and reasons of refusals."""
