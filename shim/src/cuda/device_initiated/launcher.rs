//! Cheap kernel launches: a graph of one kernel, at half of what the driver takes for a launch
//! (`docs/decisions/037-launches-by-graphs.md`).
//!
//! Each goes by a graph of one kernel, which is told the arguments. A graph that has to become another function's, or one of other blocks, costs
//! as much as a launch. So several are kept, for as many kinds of calls that take turns. All are made before the first launch.

use mccs_cuda::{Context, DriverError, Function, KernelGraph, RawStream};
use mccs_kernels::cuda::Launch;

use super::recent::Recent;
use crate::Error;
use crate::cuda::cuda_error;

/// The driver takes some 110 KiB of GPU memory for each.
pub(super) const GRAPHS: usize = 6;
/// Streams whose priorities are known: a program has one or two for a communicator.
const STREAMS: usize = 4;

pub(super) struct Launcher {
    graphs: Vec<KernelGraph>,
    kept: Kept<Shape>,
    /// Priorities of the streams that were launched into last, by the streams' numbers, which no others get.
    priorities: Recent<u64, i32>,
}

/// Shape that a graph is ready for.
type Shape = (Function, u32, u32);

/// Shapes that graphs are ready for, the one that was launched last first.
struct Kept<T>(Vec<(usize, Option<T>)>);

impl<T: PartialEq> Kept<T> {
    fn new(graphs: usize) -> Self {
        Kept((0..graphs).map(|graph| (graph, None)).collect())
    }

    /// The graph to launch: the one that is ready for it, or else the one that was not launched for longest.
    fn choose(&mut self, wanted: T) -> usize {
        let is_wanted = |(_, shape): &(usize, Option<T>)| shape.as_ref() == Some(&wanted);
        let place = self.0.iter().position(is_wanted).unwrap_or(self.0.len() - 1);
        self.0[..=place].rotate_right(1);
        let (graph, shape) = &mut self.0[0];
        *shape = Some(wanted);
        *graph
    }
}

impl Launcher {
    /// Makes so many graphs.
    ///
    /// # Safety
    /// The function must be that of the launch, and the context's.
    pub(super) unsafe fn new<T>(
        context: &Context,
        graphs: usize,
        function: Function,
        launch: &Launch<T>,
    ) -> Result<Self, Error> {
        let kept = Kept::new(graphs);
        // SAFETY: the caller's contract.
        let graphs = (0..graphs).map(|_| unsafe { KernelGraph::new(context, function, &launch.args) });
        let graphs = graphs.collect::<Result<_, _>>().map_err(cuda_error)?;
        Ok(Launcher { graphs, kept, priorities: Recent::new(STREAMS) })
    }

    /// Launches a kernel behind all that were launched here before, into a stream with this number; or into a graph of the caller's, where
    /// the stream is captured and has none.
    ///
    /// # Safety
    /// As [`Function::launch`], for the function and the argument.
    pub(super) unsafe fn launch<T>(
        &mut self,
        stream: RawStream,
        number: Option<u64>,
        function: Function,
        launch: &Launch<T>,
    ) -> Result<(), DriverError> {
        let &Launch { grid, block, ref args, .. } = launch;
        // SAFETY: the caller's contract is passed on.
        unsafe {
            let priority = match number {
                Some(number) => Some(self.priorities.place(number, |_| stream.priority())?),
                None => None,
            };
            if priority.is_none_or(|place| self.priorities[place] != 0) {
                return function.launch(stream, grid, block, args);
            }
            let graph = self.kept.choose((function, grid, block));
            self.graphs[graph].launch(stream, function, grid, block, args)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_of_calls_that_take_turns_keep_their_graphs() {
        let mut kept = Kept::new(3);
        let graphs = ["a", "b", "c", "a", "b", "c"].map(|wanted| kept.choose(wanted));
        assert_eq!(graphs[..3], graphs[3..]);
        assert!(graphs[0] != graphs[1] && graphs[1] != graphs[2] && graphs[0] != graphs[2]);
        // The one that was not wanted for longest goes.
        assert_eq!(
            ["b", "a", "d", "b", "a"].map(|wanted| kept.choose(wanted)),
            [1, 0, 2, 1, 0].map(|turn| graphs[turn])
        );
    }
}
