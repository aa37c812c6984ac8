//! Last values of a program that uses them again and again: a few values by key.

use std::ops::{Index, IndexMut};

/// The values of so many keys. A new key takes the place of the oldest.
pub(super) struct Recent<K, V> {
    entries: Vec<(K, V)>,
    most: usize,
    /// Place of the value that was asked for last.
    last: usize,
    /// Place of the oldest, once all places are taken.
    oldest: usize,
}

impl<K: PartialEq, V> Recent<K, V> {
    pub(super) fn new(most: usize) -> Self {
        Recent { entries: Vec::with_capacity(most), most, last: 0, oldest: 0 }
    }

    /// Place of a key's value. `make` makes one that is not there; its error changes nothing.
    pub(super) fn place<E>(&mut self, key: K, make: impl FnOnce(&K) -> Result<V, E>) -> Result<usize, E> {
        // Most programs repeat the call before.
        if self.entries.get(self.last).is_none_or(|(known, _)| *known != key) {
            self.last = match self.entries.iter().position(|(known, _)| *known == key) {
                Some(place) => place,
                None => {
                    let value = make(&key)?;
                    self.put(key, value)
                }
            };
        }
        Ok(self.last)
    }

    fn put(&mut self, key: K, value: V) -> usize {
        if self.entries.len() < self.most {
            self.entries.push((key, value));
            return self.entries.len() - 1;
        }
        let place = self.oldest;
        self.entries[place] = (key, value);
        self.oldest = (place + 1) % self.most;
        place
    }
}

impl<K, V> Index<usize> for Recent<K, V> {
    type Output = V;

    fn index(&self, place: usize) -> &V {
        &self.entries[place].1
    }
}

impl<K, V> IndexMut<usize> for Recent<K, V> {
    fn index_mut(&mut self, place: usize) -> &mut V {
        &mut self.entries[place].1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Asks for keys, of which four are kept. Returns those whose values were made.
    fn made_of(keys: &[i32]) -> Vec<i32> {
        let (mut recent, mut made) = (Recent::new(4), Vec::new());
        for &key in keys {
            let make = |key: &i32| {
                made.push(*key);
                Ok::<_, ()>(-key)
            };
            let place = recent.place(key, make).expect("made");
            assert_eq!(recent[place], -key);
        }
        made
    }

    #[test]
    fn a_value_is_made_once_while_it_is_used() {
        assert_eq!(made_of(&[1, 2, 1, 2, 1]), [1, 2]);
    }

    #[test]
    fn the_oldest_goes() {
        assert_eq!(made_of(&[1, 2, 3, 4, 5, 2, 1, 3, 2]), [1, 2, 3, 4, 5, 1, 2]);
    }

    #[test]
    fn what_cannot_be_made_takes_no_place() {
        let mut recent = Recent::new(1);
        assert_eq!(recent.place(1, |_| Ok::<_, &str>("one")), Ok(0));
        assert_eq!(recent.place(2, |_| Err("no")), Err("no"));
        assert_eq!(recent.place(1, |_| Err("made again")), Ok(0));
        recent[0] = "changed";
        assert_eq!(recent[0], "changed");
    }
}
