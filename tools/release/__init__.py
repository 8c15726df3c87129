"""`make release`: everything that a release consists of, under out/release. Nothing is uploaded."""
