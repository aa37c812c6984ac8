//! Handle tables: slots named by index and generation, so that a stale handle is refused.

use mccs_ipc::types::Handle;

/// A table of at most `capacity` values. A handle whose slot was emptied, or given to another value, finds nothing.
#[derive(Debug)]
pub struct HandleTable<T> {
    slots: Vec<Slot<T>>,
    free: Vec<u32>,
    capacity: u32,
}

#[derive(Debug)]
struct Slot<T> {
    generation: u32,
    value: Option<T>,
}

impl<T> HandleTable<T> {
    /// An empty table; memory grows with use.
    #[must_use]
    pub fn new(capacity: u32) -> Self {
        HandleTable { slots: Vec::new(), free: Vec::new(), capacity }
    }

    /// Adds a value. Gives it back when the table is full.
    pub fn insert(&mut self, value: T) -> Result<Handle, T> {
        if let Some(index) = self.free.pop() {
            let slot = &mut self.slots[index as usize];
            // Generation 0 is never valid, so that a zeroed handle names nothing.
            slot.generation = slot.generation.wrapping_add(1).max(1);
            slot.value = Some(value);
            return Ok(Handle { index, generation: slot.generation });
        }
        let index = self.slots.len() as u32;
        if index >= self.capacity {
            return Err(value);
        }
        self.slots.push(Slot { generation: 1, value: Some(value) });
        Ok(Handle { index, generation: 1 })
    }

    /// The value a handle names.
    #[must_use]
    pub fn get(&self, handle: Handle) -> Option<&T> {
        let slot = self.slots.get(handle.index as usize)?;
        slot.value.as_ref().filter(|_| slot.generation == handle.generation)
    }

    /// The value a handle names, for changing it.
    pub fn get_mut(&mut self, handle: Handle) -> Option<&mut T> {
        let slot = self.slots.get_mut(handle.index as usize)?;
        slot.value.as_mut().filter(|_| slot.generation == handle.generation)
    }

    /// Takes a value out.
    pub fn remove(&mut self, handle: Handle) -> Option<T> {
        let slot = self.slots.get_mut(handle.index as usize)?;
        let value = if slot.generation == handle.generation { slot.value.take() } else { None };
        if value.is_some() {
            self.free.push(handle.index);
        }
        value
    }

    /// All values with their handles.
    pub fn iter(&self) -> impl Iterator<Item = (Handle, &T)> {
        self.slots.iter().enumerate().filter_map(|(index, slot)| {
            let value = slot.value.as_ref()?;
            Some((Handle { index: index as u32, generation: slot.generation }, value))
        })
    }

    /// All values with their handles, for changing them.
    pub fn iter_mut(&mut self) -> impl Iterator<Item = (Handle, &mut T)> {
        self.slots.iter_mut().enumerate().filter_map(|(index, slot)| {
            let value = slot.value.as_mut()?;
            Some((Handle { index: index as u32, generation: slot.generation }, value))
        })
    }

    /// All slots with their generations, as another table goes on with.
    pub fn slots(&self) -> impl Iterator<Item = (u32, Option<&T>)> {
        self.slots.iter().map(|slot| (slot.generation, slot.value.as_ref()))
    }

    /// A table that goes on where another one stood: with its slots, and their generations. `None` where they are more than `capacity`.
    #[must_use]
    pub fn resume(capacity: u32, slots: impl IntoIterator<Item = (u32, Option<T>)>) -> Option<Self> {
        let slots: Vec<_> = slots.into_iter().map(|(generation, value)| Slot { generation, value }).collect();
        let is_free = |(_, slot): &(u32, &Slot<T>)| slot.value.is_none();
        let free = (0..).zip(&slots).filter(is_free).map(|(index, _)| index).collect();
        (slots.len() <= capacity as usize).then_some(HandleTable { slots, free, capacity })
    }

    /// Number of values.
    #[must_use]
    pub fn len(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_goes_on_where_another_stood() {
        let mut first = HandleTable::new(3);
        let [a, b] = ['a', 'b'].map(|value| first.insert(value).expect("room"));
        first.remove(a);
        let slots: Vec<_> = first.slots().map(|(generation, value)| (generation, value.copied())).collect();
        assert!(HandleTable::resume(1, slots.clone()).is_none(), "more than it may have");
        let mut second = HandleTable::resume(3, slots).expect("as many as it may have");
        assert_eq!((second.get(a), second.get(b), second.len()), (None, Some(&'b'), 1));
        let next = second.insert('c').expect("room");
        assert_eq!((next.index, next.generation), (a.index, a.generation + 1), "no handle names two values");
    }

    #[test]
    fn stale_forged_and_zero_handles_find_nothing() {
        let mut table = HandleTable::new(2);
        let first = table.insert('a').expect("room");
        assert_eq!(table.remove(first), Some('a'));
        assert_eq!(table.remove(first), None);
        let second = table.insert('b').expect("room");
        assert_eq!(second.index, first.index);
        assert_eq!(table.get(first), None);
        assert_eq!(table.get(Handle { index: 7, generation: 1 }), None);
        assert_eq!(table.get(Handle { index: second.index, generation: 0 }), None);
        assert_eq!(table.get(second), Some(&'b'));
        table.insert('c').expect("room");
        assert_eq!(table.insert('d'), Err('d'));
        assert_eq!(table.len(), 2);
    }
}
