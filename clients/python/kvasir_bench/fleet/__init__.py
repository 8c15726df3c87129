"""`kvasir bench fleet --simulate`: a day of a large fleet on paper, by the code's own placement and formats."""
