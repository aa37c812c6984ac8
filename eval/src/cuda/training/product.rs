//! Matrix products on tensor cores, as a model computes them. How long one takes depends on the
//! multiprocessors that are free and on the bandwidth of caches and memory, as of a library's.

use std::fmt::Write as _;

use bytemuck::{Pod, Zeroable};
use mccs_cuda::{Context, DeviceAddress, DriverError, Function, Module, RawStream};

/// Elements of the result that a block makes, in each direction: eight warps, two below each other and four beside each other.
pub const TILE: u32 = 128;
/// A product's depth is a multiple of it.
pub const DEPTH_UNIT: u32 = 32;
const THREADS: u32 = 256;
/// A warp's part of the tile, in fragments of 16 rows and of 8 columns.
const ROW_FRAGMENTS: usize = 4;
const COLUMN_FRAGMENTS: usize = 4;
/// Rows of operands that a lane loads from: two of each fragment of 16, one of each of 8.
const LOADS: usize = 2 * ROW_FRAGMENTS + COLUMN_FRAGMENTS;

/// `result = left x right`, where `left` has `rows` of `depth` elements, `right` is stored by columns, `columns` of `depth` elements, and the result
/// has `rows` of `columns` elements. All are bfloat16, accumulated in float.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct Product {
    /// Address, of 16 bytes' alignment as the others.
    pub left: DeviceAddress,
    /// Address.
    pub right: DeviceAddress,
    /// Address.
    pub result: DeviceAddress,
    /// A multiple of [`TILE`].
    pub rows: u32,
    /// A multiple of [`TILE`].
    pub columns: u32,
    /// A multiple of [`DEPTH_UNIT`].
    pub depth: u32,
    /// `rows / TILE`.
    pub tiles_down: u32,
}

/// The kernel, loaded.
pub struct Multiplier {
    _module: Module,
    function: Function,
}

impl Multiplier {
    /// Loads it into a context.
    ///
    /// # Errors
    /// The driver's.
    pub fn new(context: &Context) -> Result<Self, DriverError> {
        let module = Module::load_ptx(context, &source())?;
        let function = module.function("training_product")?;
        Ok(Multiplier { _module: module, function })
    }

    /// Enqueues a product. The kernel's context must be current.
    ///
    /// # Safety
    /// The stream must live, and the operands and the result too, until the product has ended.
    ///
    /// # Errors
    /// The driver's.
    pub unsafe fn multiply(&self, stream: RawStream, product: &Product) -> Result<(), DriverError> {
        let blocks = product.tiles_down * (product.columns / TILE);
        // SAFETY: the kernel takes such an argument; the rest is the caller's contract.
        unsafe { self.function.launch(stream, blocks, THREADS, product) }
    }
}

/// Each lane loads 8 elements of a row at once, and feeds them to two instructions of 16 deep. That permutes the depth, in both operands alike. The
/// next elements are loaded before the last ones are used.
fn source() -> String {
    let mut text = String::from(HEAD);
    let (accumulators, registers) = (ROW_FRAGMENTS * COLUMN_FRAGMENTS * 4, 2 * LOADS * 4);
    let _ = writeln!(text, ".reg .f32 %c<{accumulators}>;\n.reg .b32 %v<{registers}>;\n.reg .b64 %p<{LOADS}>;");
    text.push_str(PLACE);
    for (load, (base, step)) in pointers().enumerate() {
        let _ = writeln!(text, "mad.wide.u32 %p{load}, %pitch, {step}, %{base};");
    }
    for at in 0..accumulators {
        let _ = writeln!(text, "mov.f32 %c{at}, 0f00000000;");
    }
    load(&mut text, 0);
    text.push_str("again:\n");
    // An even and an odd half of the loop, with registers of their own; the last loads are of the first elements again, and are not used.
    for half in 0..2 {
        let _ =
            writeln!(text, "sub.u32 %left, %left, 1;\nsetp.eq.u32 %last, %left, 0;\nselp.b64 %step, %back, 64, %last;");
        for at in 0..LOADS {
            let _ = writeln!(text, "add.s64 %p{at}, %p{at}, %step;");
        }
        load(&mut text, 1 - half);
        multiply(&mut text, half);
        let _ = writeln!(text, "@%last bra over;");
    }
    text.push_str("bra again;\nover:\n");
    store(&mut text);
    text.push_str("ret;\n}\n");
    text
}

/// The start of a lane's rows, and how many rows further down they are.
fn pointers() -> impl Iterator<Item = (&'static str, usize)> {
    let rows = (0..2 * ROW_FRAGMENTS).map(|row| ("a", 8 * row));
    rows.chain((0..COLUMN_FRAGMENTS).map(|column| ("b", 8 * column)))
}

fn load(text: &mut String, half: usize) {
    for at in 0..LOADS {
        let first = (half * LOADS + at) * 4;
        let _ = writeln!(
            text,
            "ld.global.nc.v4.b32 {{%v{first},%v{},%v{},%v{}}}, [%p{at}];",
            first + 1,
            first + 2,
            first + 3
        );
    }
}

fn multiply(text: &mut String, half: usize) {
    let register = |load: usize, word: usize| (half * LOADS + load) * 4 + word;
    for (low, high) in [(0, 1), (2, 3)] {
        for row in 0..ROW_FRAGMENTS {
            for column in 0..COLUMN_FRAGMENTS {
                let c = (row * COLUMN_FRAGMENTS + column) * 4;
                let [upper, lower, right] = [2 * row, 2 * row + 1, 2 * ROW_FRAGMENTS + column];
                let _ = writeln!(
                    text,
                    "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {{%c{c},%c{},%c{},%c{}}}, \
                     {{%v{},%v{},%v{},%v{}}}, {{%v{},%v{}}}, {{%c{c},%c{},%c{},%c{}}};",
                    c + 1,
                    c + 2,
                    c + 3,
                    register(upper, low),
                    register(lower, low),
                    register(upper, high),
                    register(lower, high),
                    register(right, low),
                    register(right, high),
                    c + 1,
                    c + 2,
                    c + 3,
                );
            }
        }
    }
}

fn store(text: &mut String) {
    for row in 0..ROW_FRAGMENTS {
        for half in 0..2 {
            for column in 0..COLUMN_FRAGMENTS {
                let c = (row * COLUMN_FRAGMENTS + column) * 4 + 2 * half;
                let _ = writeln!(
                    text,
                    "cvt.rn.bf16x2.f32 %word, %c{}, %c{c};\nst.global.b32 [%to+{}], %word;",
                    c + 1,
                    16 * column
                );
            }
            let _ = writeln!(text, "mad.wide.u32 %to, %width, 8, %to;");
        }
    }
}

const HEAD: &str = "\
.version 7.0
.target sm_80
.address_size 64
.visible .entry training_product(.param .align 8 .b8 product[40])
.maxntid 256, 1, 1
{
.reg .pred %last;
.reg .b32 %block, %thread, %lane, %warp, %quad, %in_quad, %down, %across, %row, %column, %x, %depth, %pitch, %columns, %width, %tiles, %left, %word;
.reg .b64 %a, %b, %to, %y, %step, %back;
";

/// Place of a lane's first elements: block `down` tiles down and `across` tiles across; in it warp `warp % 2` down and `warp / 2` across.
const PLACE: &str = "\
mov.u32 %block, %ctaid.x;
mov.u32 %thread, %tid.x;
ld.param.u64 %a, [product];
ld.param.u64 %b, [product+8];
ld.param.u64 %to, [product+16];
ld.param.u32 %columns, [product+28];
ld.param.u32 %depth, [product+32];
ld.param.u32 %tiles, [product+36];
shl.b32 %pitch, %depth, 1;
shl.b32 %width, %columns, 1;
shr.u32 %left, %depth, 5;
and.b32 %lane, %thread, 31;
shr.u32 %warp, %thread, 5;
shr.u32 %quad, %lane, 2;
and.b32 %in_quad, %lane, 3;
rem.u32 %down, %block, %tiles;
div.u32 %across, %block, %tiles;
and.b32 %x, %warp, 1;
shl.b32 %x, %x, 6;
shl.b32 %row, %down, 7;
add.u32 %row, %row, %x;
add.u32 %row, %row, %quad;
shr.u32 %x, %warp, 1;
shl.b32 %x, %x, 5;
shl.b32 %column, %across, 7;
add.u32 %column, %column, %x;
mad.wide.u32 %to, %row, %width, %to;
mul.wide.u32 %y, %column, 2;
add.s64 %to, %to, %y;
mul.wide.u32 %y, %in_quad, 4;
add.s64 %to, %to, %y;
add.u32 %column, %column, %quad;
mad.wide.u32 %a, %row, %pitch, %a;
mad.wide.u32 %b, %column, %pitch, %b;
mul.wide.u32 %y, %in_quad, 16;
add.s64 %a, %a, %y;
add.s64 %b, %b, %y;
mul.wide.u32 %back, %pitch, 1;
neg.s64 %back, %back;
add.s64 %back, %back, 64;
";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_loop_has_as_many_loads_and_products_as_tiles_take() {
        let text = source();
        // A first load, and one in each half.
        assert_eq!(text.matches("ld.global.nc").count(), 3 * LOADS);
        assert_eq!(text.matches("mma.sync").count(), 2 * 2 * ROW_FRAGMENTS * COLUMN_FRAGMENTS);
        assert_eq!(text.matches("st.global").count(), 2 * ROW_FRAGMENTS * COLUMN_FRAGMENTS);
    }
}
