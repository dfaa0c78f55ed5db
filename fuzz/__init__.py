"""Campaigns and findings; no part of the installed package."""
