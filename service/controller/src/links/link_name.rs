//! Name of a link: its ends.

/// A link between two switches, or a host and a switch.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct LinkName {
    /// Leaf, or host.
    pub lower: String,
    /// Spine, or leaf.
    pub upper: String,
}
