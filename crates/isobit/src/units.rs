//! Bytes and seconds in readable form, and bytes as people type them.

/// Bytes in a suitable unit.
pub(crate) fn size(bytes: u64) -> String {
    let units = [("GiB", 1_u64 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)];
    let (name, unit) = units.into_iter().find(|(_, unit)| bytes >= unit / 10).unwrap_or(units[2]);
    format!("{:.2} {name}", bytes as f64 / unit as f64)
}

/// Units of bytes as people type them; letters may be small.
const UNITS: [(&str, u64); 9] = [
    ("KiB", 1 << 10),
    ("MiB", 1 << 20),
    ("GiB", 1 << 30),
    ("TiB", 1 << 40),
    ("KB", 1_000),
    ("MB", 1_000_000),
    ("GB", 1_000_000_000),
    ("TB", 1_000_000_000_000),
    ("B", 1),
];
/// BOUND: amounts of memory, so that sums of them do not overflow.
const BYTES_MAX: f64 = (1_u64 << 62) as f64;

/// Parses an amount of memory: `32` or `32GiB`, `512MiB`, `23.5 GB`. A bare number is in GiB.
pub(crate) fn bytes(text: &str) -> Result<u64, String> {
    const HINT: &str = "write 32 or 32GiB, 512MiB, 23.5GB; units are B, KB, MB, GB, TB, KiB, MiB, GiB and TiB";
    let text = text.trim();
    let is_of_number = |letter: char| letter.is_ascii_digit() || ".+-eE".contains(letter);
    let end = text.find(|letter| !is_of_number(letter)).unwrap_or(text.len());
    let (number, unit) = (&text[..end], text[end..].trim_start());
    let number: f64 = number.parse().map_err(|_| format!("not a number with a unit; {HINT}"))?;
    let known = UNITS.iter().find(|(name, _)| name.eq_ignore_ascii_case(unit)).map(|(_, scale)| *scale);
    let scale = if unit.is_empty() { Some(1 << 30) } else { known };
    let scale = scale.ok_or_else(|| format!("`{unit}` is not a unit of bytes; {HINT}"))?;
    let bytes = number * scale as f64;
    if (0.0..=BYTES_MAX).contains(&bytes) {
        Ok(bytes as u64)
    } else {
        Err("not an amount that a machine has".to_string())
    }
}

/// A readable duration: `42s`, `3m 05s`, `2h 07m`, `3d 04h`.
pub(crate) fn time(seconds: f64) -> String {
    let whole = seconds.round().max(0.0) as u64;
    match whole {
        0..60 => format!("{whole}s"),
        60..3600 => format!("{}m {:02}s", whole / 60, whole % 60),
        3600..86400 => format!("{}h {:02}m", whole / 3600, whole / 60 % 60),
        _ => format!("{}d {:02}h", whole / 86400, whole / 3600 % 24),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_in_the_unit_that_shows_them() {
        let shown = [0, 600, 3 << 19, 100 << 20, 200 << 20, 80 << 30].map(size);
        assert_eq!(shown, ["0.00 KiB", "0.59 KiB", "1.50 MiB", "100.00 MiB", "0.20 GiB", "80.00 GiB"]);
    }

    #[test]
    fn amounts_as_people_type_them() {
        for (text, wanted) in [
            ("32", 32 << 30),
            ("0", 0),
            ("0.5", 1 << 29),
            ("1e1", 10 << 30),
            ("32GiB", 32 << 30),
            ("32 GiB", 32 << 30),
            ("1.5gib", 3 << 29),
            ("512MiB", 512 << 20),
            ("2TiB", 2 << 40),
            ("8KiB", 8192),
            ("24GB", 24_000_000_000),
            ("0.25TB", 250_000_000_000),
            ("7mb", 7_000_000),
            ("3KB", 3_000),
            ("12345B", 12_345),
        ] {
            assert_eq!(bytes(text), Ok(wanted), "{text}");
        }
        for text in
            ["", "much", "GiB", "1.2.3", "-1", "-0.5GiB", "nan", "inf", "1e300", "32G", "32 GiB!", "5 G iB", "1,5GB"]
        {
            assert!(bytes(text).is_err(), "{text}");
        }
        assert!(bytes("32G").is_err_and(|why| why.contains("`G` is not a unit") && why.contains("GiB")));
    }

    #[test]
    fn times_as_people_say_them() {
        let said = [0.2, 59.4, 59.6, 185.0, 3600.0, 7620.0, 273_600.0].map(time);
        assert_eq!(said, ["0s", "59s", "1m 00s", "3m 05s", "1h 00m", "2h 07m", "3d 04h"]);
    }
}
