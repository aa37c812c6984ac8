//! Plan of a training step: what a rank enqueues, in order (DDP, FSDP2, MoE); pure data.

use mccs::CollectiveKind;

use super::product::{DEPTH_UNIT, TILE};

/// Bytes of an element: bfloat16.
pub const ELEMENT_BYTES: u64 = 2;

/// How a model is trained on several GPUs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Workload {
    /// Replicas, whose gradients are all-reduced in buckets during the backward pass.
    Ddp,
    /// Parameters in shards: gathered a layer ahead, twice a step; gradients are reduce-scattered.
    Fsdp,
    /// As `Ddp`, with experts in every second layer: all-to-alls before and behind them, in both passes.
    Moe,
}

impl Workload {
    /// All.
    pub const ALL: [Workload; 3] = [Workload::Ddp, Workload::Fsdp, Workload::Moe];

    /// As results and command lines call it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Workload::Ddp => "ddp",
            Workload::Fsdp => "fsdp",
            Workload::Moe => "moe",
        }
    }
}

impl std::str::FromStr for Workload {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let of_name = Self::ALL.into_iter().find(|workload| workload.name() == text);
        of_name.ok_or_else(|| format!("{text:?} is not ddp, fsdp or moe"))
    }
}

/// A model, and what is trained on at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
pub struct Shape {
    /// Layers, each with 12 `width`^2 parameters.
    pub layers: u32,
    /// Elements of a token; a multiple of [`TILE`].
    pub width: u32,
    /// Tokens of a rank; a multiple of [`TILE`].
    pub tokens: u32,
    /// Most bytes of an all-reduce of gradients; the first is of at most `first_bucket_bytes`.
    pub bucket_bytes: u64,
    /// See there.
    pub first_bucket_bytes: u64,
}

/// A matrix product of a layer, in widths.
#[derive(Debug, Clone, Copy)]
struct Product {
    columns: u32,
    depth: u32,
}

/// Products of a layer: attention's input and output, and the two of the perceptron.
const PRODUCTS: [Product; 4] = [
    Product { columns: 3, depth: 1 },
    Product { columns: 1, depth: 1 },
    Product { columns: 4, depth: 1 },
    Product { columns: 1, depth: 4 },
];

impl Shape {
    /// Bytes of a layer's parameters, and of its gradients.
    #[must_use]
    pub fn layer_bytes(&self) -> u64 {
        12 * u64::from(self.width).pow(2) * ELEMENT_BYTES
    }

    /// Bytes of all layers.
    #[must_use]
    pub fn model_bytes(&self) -> u64 {
        self.layer_bytes() * u64::from(self.layers)
    }

    /// Bytes that go from layer to layer.
    #[must_use]
    pub fn activation_bytes(&self) -> u64 {
        u64::from(self.tokens) * u64::from(self.width) * ELEMENT_BYTES
    }

    /// Why it cannot be computed with, if so.
    #[must_use]
    pub fn fault(&self, nranks: u32) -> Option<String> {
        let is_whole = |number: u32| number > 0 && number.is_multiple_of(TILE);
        if self.layers == 0 || !is_whole(self.width) || !is_whole(self.tokens) || !TILE.is_multiple_of(DEPTH_UNIT) {
            return Some(format!("there must be layers, and width and tokens must be multiples of {TILE}"));
        }
        let parts = u64::from(nranks) * ELEMENT_BYTES;
        if !self.layer_bytes().is_multiple_of(parts) || !self.activation_bytes().is_multiple_of(parts) {
            return Some(format!("layers and activations must be divisible by {nranks} ranks"));
        }
        if self.bucket_bytes < ELEMENT_BYTES || self.first_bucket_bytes < ELEMENT_BYTES {
            return Some("buckets must have room for an element".into());
        }
        None
    }
}

/// A stream of a rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StreamRole {
    /// The stream of the model.
    Compute,
    /// The stream of collectives.
    Collectives,
    /// The stream of FSDP's reduce-scatters, beside its all-gathers.
    Scatters,
}

/// A buffer of a rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Space {
    /// Data that differ by rank, and that nobody writes: gradients as the backward pass makes them, a shard's parameters, tokens.
    Source,
    /// Bytes to be sent.
    Staging,
    /// Results of collectives.
    Result,
}

/// A step's part.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// A product with a layer's parameters, `columns` and `depth` in widths.
    Multiply {
        /// Layer.
        layer: u32,
        /// Columns of the parameters.
        columns: u32,
        /// Rows of the parameters.
        depth: u32,
    },
    /// `Staging` at `at` becomes as `Source`.
    Stage {
        /// Stream.
        stream: StreamRole,
        /// First byte, in both.
        at: u64,
        /// So many.
        bytes: u64,
    },
    /// Later work of `later` waits for the work that `earlier` was given so far.
    Join {
        /// Stream.
        earlier: StreamRole,
        /// Stream.
        later: StreamRole,
    },
    /// A collective, of which `count` elements are those of NCCL's call.
    Collective {
        /// Which one; all-reduces are in place.
        kind: CollectiveKind,
        /// Stream.
        stream: StreamRole,
        /// Its input.
        from: (Space, u64),
        /// Offset in `Result` of its output; all-reduces write to where they read.
        to: u64,
        /// Elements.
        count: u64,
    },
}

/// Bytes of a rank's buffers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Layout {
    /// Bytes of [`Space::Source`].
    pub source: u64,
    /// Bytes of [`Space::Staging`].
    pub staging: u64,
    /// Bytes of [`Space::Result`].
    pub result: u64,
}

/// A step.
#[derive(Debug, Clone)]
pub struct Plan {
    /// In the order in which they are enqueued.
    pub actions: Vec<Action>,
    /// The spaces that they need.
    pub layout: Layout,
}

impl Plan {
    /// A step of a workload. The shape has no [`Shape::fault`].
    #[must_use]
    pub fn new(workload: Workload, shape: &Shape, nranks: u32) -> Plan {
        match workload {
            Workload::Ddp => Builder::new(shape, nranks).ddp(),
            Workload::Fsdp => Builder::new(shape, nranks).fsdp(),
            Workload::Moe => Builder::new(shape, nranks).moe(),
        }
    }

    /// The same without its collectives, and what waits for them.
    #[must_use]
    pub fn without_collectives(&self) -> Plan {
        let stays = |action: &&Action| !matches!(action, Action::Collective { .. });
        Plan { actions: self.actions.iter().filter(stays).copied().collect(), layout: self.layout }
    }

    /// Its collectives.
    pub fn collectives(&self) -> impl Iterator<Item = &Action> {
        self.actions.iter().filter(|action| matches!(action, Action::Collective { .. }))
    }
}

struct Builder<'a> {
    shape: &'a Shape,
    ranks: u64,
    actions: Vec<Action>,
    /// Gradients that were made, and those that are in buckets that were all-reduced.
    made: u64,
    reduced: u64,
    /// Tokens that went to experts and back.
    exchanged: u64,
}

impl<'a> Builder<'a> {
    fn new(shape: &'a Shape, nranks: u32) -> Self {
        Builder { shape, ranks: u64::from(nranks), actions: Vec::new(), made: 0, reduced: 0, exchanged: 0 }
    }

    fn join(&mut self, earlier: StreamRole, later: StreamRole) {
        self.actions.push(Action::Join { earlier, later });
    }

    fn multiply(&mut self, layer: u32, Product { columns, depth }: Product) {
        self.actions.push(Action::Multiply { layer, columns, depth });
    }

    fn forward(&mut self, layer: u32) {
        PRODUCTS.into_iter().for_each(|product| self.multiply(layer, product));
    }

    /// A product of the backward pass: of its input's gradient, and of its parameters'.
    fn backward(&mut self, layer: u32, product: Product) {
        self.multiply(layer, product);
        self.multiply(layer, product);
    }

    /// Gradients of so many bytes are there: full buckets go.
    fn gradients(&mut self, bytes: u64) {
        self.made += bytes;
        loop {
            let most = if self.reduced == 0 { self.shape.first_bucket_bytes } else { self.shape.bucket_bytes };
            if self.made - self.reduced < most {
                return;
            }
            self.bucket(most / ELEMENT_BYTES * ELEMENT_BYTES);
        }
    }

    fn bucket(&mut self, bytes: u64) {
        let at = self.reduced;
        self.actions.push(Action::Stage { stream: StreamRole::Compute, at, bytes });
        self.join(StreamRole::Compute, StreamRole::Collectives);
        let (kind, count) = (CollectiveKind::AllReduce, bytes / ELEMENT_BYTES);
        let from = (Space::Staging, at);
        self.actions.push(Action::Collective { kind, stream: StreamRole::Collectives, from, to: 0, count });
        self.reduced += bytes;
    }

    /// The rest of the gradients, and the end of the step.
    fn last_bucket(&mut self) {
        if self.made > self.reduced {
            self.bucket(self.made - self.reduced);
        }
        self.join(StreamRole::Collectives, StreamRole::Compute);
    }

    fn backward_in_buckets(&mut self, layer: u32, products: &[Product]) {
        let width_bytes = u64::from(self.shape.width).pow(2) * ELEMENT_BYTES;
        for product in products.iter().rev() {
            self.backward(layer, *product);
            self.gradients(u64::from(product.columns * product.depth) * width_bytes);
        }
    }

    fn ddp(mut self) -> Plan {
        (0..self.shape.layers).for_each(|layer| self.forward(layer));
        (0..self.shape.layers).rev().for_each(|layer| self.backward_in_buckets(layer, &PRODUCTS));
        self.last_bucket();
        let bytes = self.shape.model_bytes();
        Plan { actions: self.actions, layout: Layout { source: bytes, staging: bytes, result: 0 } }
    }

    /// A layer's parameters, of every rank's shard. Those of the backward pass come to the same place.
    fn gather(&mut self, layer: u32) {
        let (bytes, to) = (self.shape.layer_bytes(), u64::from(layer) * self.shape.layer_bytes());
        let (kind, stream, count) =
            (CollectiveKind::AllGather, StreamRole::Collectives, bytes / self.ranks / ELEMENT_BYTES);
        self.actions.push(Action::Collective { kind, stream, from: (Space::Source, to / self.ranks), to, count });
    }

    /// A layer's gradients: staged, as FSDP copies them together, and scattered behind the gathered parameters of all layers.
    fn scatter(&mut self, layer: u32) {
        let (bytes, at) = (self.shape.layer_bytes(), u64::from(layer) * self.shape.layer_bytes());
        let (kind, stream, count) =
            (CollectiveKind::ReduceScatter, StreamRole::Scatters, bytes / self.ranks / ELEMENT_BYTES);
        self.join(StreamRole::Compute, stream);
        self.actions.push(Action::Stage { stream, at, bytes });
        let to = self.shape.model_bytes() + at / self.ranks;
        self.actions.push(Action::Collective { kind, stream, from: (Space::Staging, at), to, count });
    }

    fn fsdp(mut self) -> Plan {
        let layers = self.shape.layers;
        // The last step's optimizer has written the shards.
        self.join(StreamRole::Compute, StreamRole::Collectives);
        self.gather(0);
        for layer in 0..layers {
            self.join(StreamRole::Collectives, StreamRole::Compute);
            if layer + 1 < layers {
                self.gather(layer + 1);
            }
            self.forward(layer);
        }
        self.join(StreamRole::Compute, StreamRole::Collectives);
        self.gather(layers - 1);
        for layer in (0..layers).rev() {
            self.join(StreamRole::Collectives, StreamRole::Compute);
            if layer > 0 {
                self.gather(layer - 1);
            }
            PRODUCTS.into_iter().rev().for_each(|product| self.backward(layer, product));
            self.scatter(layer);
        }
        self.join(StreamRole::Scatters, StreamRole::Compute);
        let model = self.shape.model_bytes();
        let layout = Layout { source: model, staging: model, result: model + model / self.ranks };
        Plan { actions: self.actions, layout }
    }

    /// Each rank's tokens to the ranks that have their experts, or back. Data of their own, each time.
    fn exchange(&mut self) {
        let (bytes, at) = (self.shape.activation_bytes(), self.exchanged);
        let (kind, stream, count) =
            (CollectiveKind::AllToAll, StreamRole::Collectives, bytes / self.ranks / ELEMENT_BYTES);
        self.join(StreamRole::Compute, stream);
        self.actions.push(Action::Collective { kind, stream, from: (Space::Source, at), to: at, count });
        self.join(stream, StreamRole::Compute);
        self.exchanged += bytes;
    }

    fn moe(mut self) -> Plan {
        let (attention, perceptron) = PRODUCTS.split_at(2);
        let has_experts = |layer: u32| layer % 2 == 1;
        for layer in 0..self.shape.layers {
            if has_experts(layer) {
                attention.iter().for_each(|product| self.multiply(layer, *product));
                self.exchange();
                perceptron.iter().for_each(|product| self.multiply(layer, *product));
                self.exchange();
            } else {
                self.forward(layer);
            }
        }
        for layer in (0..self.shape.layers).rev() {
            if has_experts(layer) {
                self.exchange();
                // Experts' gradients stay on their rank.
                perceptron.iter().rev().for_each(|product| self.backward(layer, *product));
                self.exchange();
                self.backward_in_buckets(layer, attention);
            } else {
                self.backward_in_buckets(layer, &PRODUCTS);
            }
        }
        self.last_bucket();
        let (model, exchanged) = (self.shape.model_bytes(), self.exchanged);
        let layout = Layout { source: model.max(exchanged), staging: model, result: exchanged };
        Plan { actions: self.actions, layout }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHAPE: Shape = Shape { layers: 4, width: 128, tokens: 256, bucket_bytes: 100_000, first_bucket_bytes: 6_000 };
    const RANKS: u32 = 4;

    fn products(plan: &Plan) -> u32 {
        let of = |action: &Action| match action {
            Action::Multiply { columns, depth, .. } => columns * depth,
            _ => 0,
        };
        plan.actions.iter().map(of).sum()
    }

    #[test]
    fn every_workload_computes_as_much_and_its_collectives_lie_in_its_buffers() {
        assert_eq!(SHAPE.fault(RANKS), None);
        for workload in Workload::ALL {
            let name = workload.name();
            let plan = Plan::new(workload, &SHAPE, RANKS);
            assert_eq!(products(&plan), SHAPE.layers * 12 * 3, "{name}");
            assert_eq!(products(&plan.without_collectives()), products(&plan));
            assert_eq!(plan.without_collectives().collectives().count(), 0);
            for action in plan.collectives() {
                let Action::Collective { kind, from: (space, at), to, count, .. } = *action else { unreachable!() };
                let bytes = |elements: Option<u64>| elements.expect("a call that fits") * ELEMENT_BYTES;
                let (sent, received) =
                    (bytes(kind.send_count(count, RANKS, 0, 0)), bytes(kind.recv_count(count, RANKS, 0, 0)));
                let room = if space == Space::Source { plan.layout.source } else { plan.layout.staging };
                assert!(count > 0 && at + sent <= room, "{name}: {action:?}");
                assert!(kind == CollectiveKind::AllReduce || to + received <= plan.layout.result, "{name}: {action:?}");
            }
        }
    }

    /// Bytes that collectives of a kind have, in the order of the step.
    fn ranges(plan: &Plan, wanted: CollectiveKind) -> Vec<(u64, u64)> {
        let of = |action: &Action| match *action {
            Action::Collective { kind, from, count, .. } if kind == wanted => Some((from.1, count * ELEMENT_BYTES)),
            _ => None,
        };
        plan.actions.iter().filter_map(of).collect()
    }

    #[test]
    fn gradients_are_reduced_once_in_buckets_behind_their_staging() {
        let plan = Plan::new(Workload::Ddp, &SHAPE, RANKS);
        let buckets = ranges(&plan, CollectiveKind::AllReduce);
        let mut end = 0;
        for (at, bytes) in &buckets {
            assert_eq!(*at, end);
            end += bytes;
        }
        assert_eq!(end, SHAPE.model_bytes());
        assert_eq!(buckets[0].1, SHAPE.first_bucket_bytes);
        let last = buckets.len() - 1;
        assert!(
            buckets[1..last].iter().all(|bucket| bucket.1 == SHAPE.bucket_bytes)
                && buckets[last].1 <= SHAPE.bucket_bytes
        );
        for (at, action) in plan.actions.iter().enumerate() {
            let Action::Collective { from, count, .. } = *action else { continue };
            let staged = Action::Stage { stream: StreamRole::Compute, at: from.1, bytes: count * ELEMENT_BYTES };
            let joined = Action::Join { earlier: StreamRole::Compute, later: StreamRole::Collectives };
            assert_eq!(plan.actions[at - 2..at], [staged, joined]);
        }
    }

    #[test]
    fn parameters_are_gathered_twice_a_layer_ahead_and_gradients_scattered_once() {
        let plan = Plan::new(Workload::Fsdp, &SHAPE, RANKS);
        let gathers = ranges(&plan, CollectiveKind::AllGather);
        assert_eq!(gathers.len() as u32, 2 * SHAPE.layers);
        assert_eq!(gathers[..4].iter().rev().collect::<Vec<_>>(), gathers[4..].iter().collect::<Vec<_>>());
        assert_eq!(ranges(&plan, CollectiveKind::ReduceScatter).len() as u32, SHAPE.layers);
        // The first layer's parameters are waited for, and the second's are on their way, before the first product.
        let first = plan.actions.iter().position(|action| matches!(action, Action::Multiply { .. })).expect("products");
        let gathered = |action: &&Action| matches!(action, Action::Collective { .. });
        assert_eq!(plan.actions[..first].iter().filter(gathered).count(), 2);
    }

    #[test]
    fn tokens_go_to_experts_and_back_in_both_passes() {
        let plan = Plan::new(Workload::Moe, &SHAPE, RANKS);
        assert_eq!(ranges(&plan, CollectiveKind::AllToAll).len() as u32, SHAPE.layers / 2 * 4);
        let reduced: u64 = ranges(&plan, CollectiveKind::AllReduce).iter().map(|bucket| bucket.1).sum();
        // Two layers whole, and attention's third of two.
        assert_eq!(reduced, SHAPE.layer_bytes() * 2 + SHAPE.layer_bytes() / 3 * 2);
    }

    #[test]
    fn shapes_that_cannot_be_computed_with_are_refused() {
        for shape in [
            Shape { layers: 0, ..SHAPE },
            Shape { width: 100, ..SHAPE },
            Shape { tokens: 1, ..SHAPE },
            Shape { bucket_bytes: 1, ..SHAPE },
        ] {
            assert!(shape.fault(RANKS).is_some(), "{shape:?}");
        }
    }
}
