"""Index data of embedding tables: files of it, and what they tell of how rows are used."""
