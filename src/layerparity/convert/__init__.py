"""Convert: a checkpoint written anew in one floating type, shard by shard, in bounded memory."""
