import numpy as np

from brainet_pl.structure import DSeparation


def test_oracle_knows_chain_fork_and_collider():
    dag = np.zeros((4, 4), dtype=bool)
    dag[0, 1] = dag[1, 2] = dag[3, 2] = True  # 0 → 1 → 2 ← 3
    oracle = DSeparation(dag)

    def separated(x, y, *condition):
        return oracle.pairs(np.array([x]), np.array([y]), np.array([condition], dtype=int).reshape(1, -1))[0] < 0

    assert not separated(0, 2)
    assert separated(0, 2, 1)
    assert separated(0, 3)
    assert not separated(0, 3, 2)
    assert separated(0, 3, 2, 1)
