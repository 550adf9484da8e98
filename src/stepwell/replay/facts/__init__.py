"""Published figures as data: each with its source and date, all to be overridden."""
