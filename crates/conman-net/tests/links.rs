//! Links between network namespaces that the tests make; they need root.

mod suite;
