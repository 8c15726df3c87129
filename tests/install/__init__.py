"""`make test-install`: a release is built, and each line of the pages that installs something runs where nothing is."""
