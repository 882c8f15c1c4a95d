"""Eigenvalues of Gram matrices, by a second way where the first does not converge."""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor
from torch.linalg import LinAlgError  # pyright: ignore[reportPrivateImportUsage, reportAttributeAccessIssue]

FELL_BACK = "the eigenvalue solver did not converge; singular values, from another algorithm, stand in for it"


def eigenvalues(
    gram: Float[Tensor, "n n"], fell_back: Callable[[str], None] = lambda note: None
) -> Float[Tensor, " n"]:
    """The eigenvalues of a Gram matrix, of which the upper half is read, smallest first; `fell_back` is called if they
    had to be found another way."""
    try:
        return torch.linalg.eigvalsh(gram, UPLO="U")  # on a CPU an eighth faster than from the lower half
    except LinAlgError:  # too many repeated eigenvalues for its divide and conquer
        fell_back(FELL_BACK)
        whole = gram.triu() + gram.triu(1).mT
        return torch.linalg.svdvals(whole.cpu()).flip(0).to(gram)


def eigenvectors(gram: Float[Tensor, "n n"]) -> tuple[Float[Tensor, " n"], Float[Tensor, "n n"]]:
    """(eigenvalues, eigenvectors as columns) of a Gram matrix, smallest first."""
    try:
        return torch.linalg.eigh(gram)
    except LinAlgError:  # as above
        vectors, values, _ = torch.linalg.svd(gram.cpu())
        return values.flip(0).to(gram), vectors.flip(1).to(gram)
