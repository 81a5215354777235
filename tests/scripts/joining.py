"""A rank that joins, and prints what it is told."""

import rowmesh as rm

if __name__ == "__main__":
    try:
        rm.init_mesh(timeout_s=30.0)
        print("joined")
    except rm.RowmeshError as error:
        print(f"{type(error).__name__}: {error}")
