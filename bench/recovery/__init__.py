"""How long a killed pool takes to answer again."""
