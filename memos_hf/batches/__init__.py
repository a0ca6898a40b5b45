"""What `generate_batch` is made of: requests, how they go into batches, where their rows end, the file they go to."""
