//! NumPy's `.npz`: an archive whose members are `.npy` files. Stored members are read where they lie.

use super::archive::{Archive, Content};
use super::error::DumpFault;
use super::npy;
use super::open::{Blob, Budget, Found};
use super::{Format, ReadOptions};

/// Finds the tensors of an archive of `.npy` members.
pub(super) fn find(blob: Blob, options: &ReadOptions, budget: &mut Budget) -> Result<Found, DumpFault> {
    let mut arrays = Vec::new();
    {
        let mut archive = Archive::open(blob.bytes())?;
        let names: Vec<String> = archive.members.iter().map(|member| member.name.clone()).collect();
        if let Some(foreign) = names.iter().find(|name| !name.ends_with(".npy")) {
            return Err(DumpFault::ForeignArchive { first: foreign.clone() });
        }
        for (index, member) in names.iter().enumerate() {
            let content = archive.content(index, false, budget)?;
            let (bytes, place) = match &content {
                Content::InPlace(range) => (blob.bytes(), (range.start, range.len())),
                Content::Inflated(bytes) => (bytes.as_slice(), (0, bytes.len())),
            };
            let name = member.strip_suffix(".npy").unwrap_or(member);
            let array = npy::member(bytes, place, name, options).map_err(|fault| match fault {
                DumpFault::Npy(why) => DumpFault::Member { member: member.clone(), why: format!("as .npy: {why}") },
                other => other,
            })?;
            arrays.push((array, content));
        }
    }
    let mut found = Found::new(Format::Npz, vec![blob]);
    for (array, content) in arrays {
        let blob = match content {
            Content::InPlace(_) => 0,
            Content::Inflated(bytes) => {
                found.blobs.push(Blob::Owned(bytes));
                found.blobs.len() - 1
            }
        };
        found.tensors.push(array.place(blob));
    }
    Ok(found)
}
