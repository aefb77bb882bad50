"""Plans as other systems read them: `exported` is what all of them can be told, and each has a file of its own."""
