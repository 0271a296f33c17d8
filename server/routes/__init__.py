"""The endpoints, a file for each group of them. Each file exports ``routes``."""
