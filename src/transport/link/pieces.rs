//! Long frames travel in pieces, so that what is more urgent need not wait for the whole of one: each piece is a
//! numbered packet of its own. A peer that takes a long frame slowly makes progress with every piece, and after a
//! break only the pieces that did not arrive are written again.

use bytes::{Bytes, BytesMut};

use crate::transport::{Frame, Lane};

/// A piece of a frame, or all of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Piece {
    pub(crate) part: Frame,
    /// Others of the same frame follow.
    pub(crate) more: bool,
}

/// Cuts a frame into pieces of at most `longest` bytes; no byte is copied.
pub(crate) fn cut(frame: Frame, longest: usize) -> impl Iterator<Item = Piece> {
    let longest = longest.max(1);
    let mut rest = Some(frame);
    std::iter::from_fn(move || {
        let Frame { lane, mut head, mut body } = rest.take()?;
        let of_head = head.len().min(longest);
        let part = Frame {
            lane,
            head: head.split_to(of_head),
            body: body.split_to(body.len().min(longest - of_head)),
        };
        let more = !head.is_empty() || !body.is_empty();
        rest = more.then_some(Frame { lane, head, body });
        Some(Piece { part, more })
    })
}

/// Puts the pieces of one lane together again.
#[derive(Debug, Default)]
#[cfg_attr(feature = "testing", derive(Clone))]
pub(crate) struct Assembly {
    head: BytesMut,
    body: BytesMut,
    begun: bool,
}

/// The pieces are more than any frame may have.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct TooLong;

impl Assembly {
    /// Takes the next piece; a frame, if it was the last one. A frame of one piece is passed on as it is.
    pub(crate) fn add(&mut self, piece: Piece, max_frame: usize) -> Result<Option<Frame>, TooLong> {
        let Piece { part, more } = piece;
        if !self.begun && !more {
            return Ok(Some(part));
        }
        if self.head.len() + self.body.len() + part.len() > max_frame {
            return Err(TooLong);
        }
        self.begun = true;
        self.head.extend_from_slice(&part.head);
        self.body.extend_from_slice(&part.body);
        Ok((!more).then(|| self.finish(part.lane)))
    }

    fn finish(&mut self, lane: Lane) -> Frame {
        let whole = std::mem::take(self);
        let (head, body): (Bytes, Bytes) = (whole.head.freeze(), whole.body.freeze());
        Frame { lane, head, body }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn what_is_cut_comes_together_again(head in 0usize..50, body in 0usize..200, longest in 0usize..60) {
            let frame = Frame::new(Lane::Bulk, vec![1; head], (0..body).map(|n| n as u8).collect::<Vec<u8>>());
            let pieces: Vec<Piece> = cut(frame.clone(), longest).collect();
            let wanted = frame.len().div_ceil(longest.max(1)).max(1);
            prop_assert_eq!(pieces.len(), wanted);
            prop_assert!(pieces.iter().all(|piece| piece.part.len() <= longest.max(1)));
            let mut assembly = Assembly::default();
            for (place, piece) in pieces.into_iter().enumerate() {
                let whole = assembly.add(piece, frame.len()).expect("not too long");
                prop_assert_eq!(whole.is_some(), place + 1 == wanted);
                if let Some(whole) = whole {
                    prop_assert_eq!(&whole, &frame);
                }
            }
        }
    }

    #[test]
    fn hazard_22_pieces_without_end_are_refused() {
        let mut assembly = Assembly::default();
        let piece = || Piece { part: Frame::new(Lane::Data, "", vec![0; 60]), more: true };
        assert_eq!(assembly.add(piece(), 100), Ok(None));
        assert_eq!(assembly.add(piece(), 100), Err(TooLong));
    }
}
