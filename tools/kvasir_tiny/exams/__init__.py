"""Exams of kvasir-tiny: what a model that was trained is asked, and the right replies."""
