"""Reports for people to look at: HTML in notebooks, plots. Figures come from the reports alone, not from a cache."""
