//! The example's parts: the regions' nodes, the network between them, and the check.

pub(crate) mod check;
pub(crate) mod hop;
pub(crate) mod ledger;
pub(crate) mod node;
pub(crate) mod site;
pub(crate) mod wide;

/// What may go wrong, for people.
pub(crate) type Failure = Box<dyn std::error::Error + Send + Sync>;

/// Rules that can be broken on purpose, to see the check find it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Broken {
    /// None.
    #[default]
    Nothing,
    /// The gateway keeps the first ring that it has heard of, and whom it chose by that goes by its own table, instead
    /// of flooding when the views differ.
    TrustsAnOldRing,
    /// The door of a node gives on what it has had before.
    ForgetsWhatItHad,
    /// The door of a node takes what its origin has closed for what has come here, though a receipt does not wait for
    /// the copy that a suspect link keeps.
    TakesReceiptsForArrivals,
}
