"""How many replicas a load needs: `capacity` computes it, `measurement` measures one replica."""
